"""Models of text: the transformers GPT and Llama, BERT and T5, and the AWD-LSTM."""
