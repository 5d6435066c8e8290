"""Shows a run during training and afterwards. This package only reads logs and files."""
