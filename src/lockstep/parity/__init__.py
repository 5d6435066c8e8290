"""The proof that trainer and engine agree, and the receipt that it leaves."""
