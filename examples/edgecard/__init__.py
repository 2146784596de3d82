"""EdgeCard: the sample vision-language MoE model, its data, and scripts that make submissions."""
