"""Tests of the strategy for Fabric."""
