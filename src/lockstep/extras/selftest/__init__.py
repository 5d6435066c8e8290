"""`lockstep verify --self-test`: known faults of this field, injected into the real code, to see which proof catches
each.
"""
