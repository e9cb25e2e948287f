"""The probe `graph`: the channel graph from input to output."""
