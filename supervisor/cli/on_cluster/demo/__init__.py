"""`holdfast demo --cluster`: install Holdfast, break a training job in each way, and remove it all."""
