"""Environment variables that PyTorch reads when it is imported."""

DEFAULT_VARIABLES = {
    # By default its threads spin while they wait for each other: on a busy machine they take
    # processor time from the threads that they wait for.
    "OMP_WAIT_POLICY": "PASSIVE",
    # Large tensors get huge pages. Memory that was freed and is allocated again comes from the
    # kernel page by page, and for large images that can take longer than the network's operations.
    "THP_MEM_ALLOC_ENABLE": "1",
}
"""What the command line and its workers set, unless the user has."""
