"""The commands of `tdpp` about runs."""
