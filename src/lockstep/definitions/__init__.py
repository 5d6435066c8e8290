"""Second implementations of what the trainer computes, written as plainly as the papers. They import none of our other code."""
