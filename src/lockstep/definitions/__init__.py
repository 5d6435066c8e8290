"""Second implementations of what the trainer computes, written like the papers' formulas.

They import none of our other code.
"""
