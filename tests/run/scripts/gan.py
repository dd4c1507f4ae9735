"""GAN: two optimizers, two backward passes of the critic, BatchNorm, fixed noise, and a gradient penalty."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

noise_size = 4
generator = nn.Sequential(
    nn.ConvTranspose2d(noise_size, 8, 2, bias=False),
    nn.BatchNorm2d(8),
    nn.ReLU(True),
    nn.ConvTranspose2d(8, 1, 4, 2, 1),
)
critic = nn.Sequential(
    nn.Conv2d(1, 4, 3, 1, 1), nn.LeakyReLU(0.2, inplace=True), nn.Flatten(), nn.Linear(64, 1), nn.Sigmoid()
)
for module in generator:
    if isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight.data, 1.0, 0.02)
criterion = nn.BCELoss()
fixed = torch.randn(4, noise_size, 1, 1)
of_critic = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.999))
of_generator = torch.optim.RMSprop(generator.parameters(), lr=2e-3)
for i, (real,) in enumerate(
    DataLoader(TensorDataset(torch.tanh(torch.randn(38, 1, 4, 4))), batch_size=12, shuffle=True)
):
    critic.zero_grad()
    label = torch.full((real.size(0),), 1.0)
    output = critic(real).view(-1)
    loss_real = criterion(output, label)
    loss_real.backward()
    score = output.mean().item()
    fake = generator(torch.randn(real.size(0), noise_size, 1, 1))
    label.fill_(0.0)
    loss_fake = criterion(critic(fake.detach()).view(-1), label)
    loss_fake.backward()
    a = torch.rand(real.size(0), 1, 1, 1)
    between = (a * real + (1 - a) * fake.detach()).requires_grad_(True)
    values = critic(between)
    slope = torch.autograd.grad(values, between, torch.ones_like(values), create_graph=True)[0]
    penalty = ((slope.view(slope.size(0), -1).norm(2, dim=1) - 1) ** 2).mean() * 10
    penalty.backward()
    of_critic.step()
    generator.zero_grad()
    label.fill_(1.0)
    loss = criterion(critic(fake).view(-1), label)
    loss.backward()
    of_generator.step()
    losses = (loss_real + loss_fake).item(), loss.item(), penalty.item()
    print("{} critic {:.12f} generator {:.12f} penalty {:.12f} D(x) {:.12f}".format(i, *losses, score))
with torch.no_grad():
    print("fixed", generator(fixed).detach().cpu().mean().item())
torch.save({"generator": generator.state_dict(), "critic": critic.state_dict()}, "gan.pt")
