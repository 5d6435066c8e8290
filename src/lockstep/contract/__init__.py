"""What trainer and engine say to each other: requests, answers, how to sample, tensors, and probes of modules."""
