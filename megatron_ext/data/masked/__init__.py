"""Samples of which tokens are hidden: those of BERT and T5."""
