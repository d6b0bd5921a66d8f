"""Pipeline-parallel training for PyTorch."""
