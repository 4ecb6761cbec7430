"""Plans made before anything is allocated: placements, units, layouts. Pure arithmetic, no communication."""
