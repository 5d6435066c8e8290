"""What a user asks for by name. An extra may import everything.

Nothing of the core imports an extra: it finds extras by name (`lockstep.extensions`).
"""
