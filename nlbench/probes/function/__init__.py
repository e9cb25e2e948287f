"""The probe `function`: the network as a differentiable function of its input."""
