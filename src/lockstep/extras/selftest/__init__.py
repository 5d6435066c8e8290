"""`lockstep verify --self-test`: injects known faults into the real code, to see which proof catches each."""
