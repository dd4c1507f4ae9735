"""One file per axis of the mesh, and what holds for all of them."""
