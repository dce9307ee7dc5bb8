"""The update of a rank's weights: rules, learning rate, precision and loss scale."""
