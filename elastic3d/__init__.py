"""elastic3d: fault-tolerant elastic 3D training for PyTorch."""
