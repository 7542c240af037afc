"""Work on runs and models beside training: reports, comparisons, calibration, votes, warm starts."""
