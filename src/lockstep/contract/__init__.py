"""What trainer and engine say to each other: requests, answers, how to sample, descriptions of tensors, and probes of
modules.
"""
