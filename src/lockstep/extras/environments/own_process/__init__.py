"""Programs that run in processes beside the trainer, with any Python.

Each imports one other library, and nothing of Lockstep.
"""
