"""The costs and gains of elastic3d, measured beside its peers on one machine in one run: `make bench`."""
