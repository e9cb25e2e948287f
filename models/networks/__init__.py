"""Networks that ship with nlbench, and the families of other libraries."""
