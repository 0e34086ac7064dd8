"""Tools that the Python rules run."""
