"""From files of text to tokenized documents."""
