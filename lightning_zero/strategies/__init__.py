"""Lightning strategies for the Trainer and for Fabric, and the code that both share."""
