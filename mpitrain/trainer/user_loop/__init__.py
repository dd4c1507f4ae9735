"""`mpitrain.initialize` and the engines that it returns, for training loops written by the user."""
