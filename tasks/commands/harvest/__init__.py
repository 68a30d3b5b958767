"""The command `harvest`: served conversations that were recorded become problems for `curate`."""
