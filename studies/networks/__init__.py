"""Networks that only studies measure: functions of known kinks, ladders, the redshift networks."""
