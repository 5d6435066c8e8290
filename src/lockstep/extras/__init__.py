"""What a user asks for by name and a run can do without: one folder each. `lockstep.extensions` names what the core loads."""
