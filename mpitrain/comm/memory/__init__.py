"""Memory that ranks communicate: arenas, arrays of other libraries, devices, other processes of the node."""
