"""What is done with runs and models beside training: reports, comparisons, calibration, votes, warm starts."""
