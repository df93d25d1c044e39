"""What elastic3d costs and gains, measured beside its peers on the same machine in the same run: `make bench`."""
