"""Networks whose ReLUs are PReLUs with a slope a channel, to be made linear unit by unit."""
