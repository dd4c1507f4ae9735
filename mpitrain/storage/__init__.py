"""What data sets, checkpoints and logs do with files, without MPI and without torch.

locks      one worker at a time in a folder
hdf5       what our HDF5 files have in common: structures, positioned writes and reads, the CRC-32 of each extent
disk       acts on files, folders that are whole or not there at all, and whether so many bytes more fit
proc       facts about this machine and its processes, of proc(5)
text       numbers, sizes and times as people read them
run_folder names of what is in a run folder
"""
