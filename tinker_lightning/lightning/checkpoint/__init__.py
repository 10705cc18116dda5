"""What a checkpoint file records of remote models, and how long their remote states are kept."""
