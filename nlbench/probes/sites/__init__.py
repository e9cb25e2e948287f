"""The probe `sites`: input and output of every activation call."""
