"""File operations shared by data sets, checkpoints and logs; they use neither MPI nor torch.

locks      locks that let one worker at a time use a folder
hdf5       shared parts of our HDF5 files: file structure, positioned reads and writes, the CRC-32 of each extent
disk       file operations, folders that appear complete or not at all, and checks of free space
proc       facts about this machine and its processes, from proc(5)
text       numbers, sizes and times formatted for people
run_folder names of the files in a run folder
"""
