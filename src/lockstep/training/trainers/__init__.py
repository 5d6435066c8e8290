"""One trainer a method, on the loop that all share."""
