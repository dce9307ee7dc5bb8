"""`tdpp data chats`: conversations by a tokenizer's chat template, with a mask of the answers beside the tokens."""
