"""Rows of a data set become prompts, in an order that a resumed run keeps."""
