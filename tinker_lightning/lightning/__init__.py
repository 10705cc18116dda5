"""Remote models in PyTorch Lightning: the module, the strategy, checkpoints and exact resume."""
