"""What `transformers.Trainer` calls while it trains: callbacks, and methods around steps and checkpoints."""
