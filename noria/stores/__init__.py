"""Where things are kept: online store, warehouse, artifact files."""
