"""Who is behind, and what is wrong with this machine.

    merging.py    the ranks' dumps of the flight recorder, and what they say together
    findings.py   what an examination says, and with which cure
    system.py     memory, limits, processors, namespaces
    packages.py   MPI, GPUs, libraries
    variables.py  what the environment says

`python -m collectives doctor` is the front.
"""
