"""Memory that ranks communicate: arenas, arrays of other libraries, device memory, memory of other processes."""
