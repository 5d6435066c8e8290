"""Attention within a tree of tokens, by blocks or FlexAttention, without a matrix of all pairs."""
