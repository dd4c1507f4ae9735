"""REINFORCE with an environment: one observation at a time, random actions, episodes of different lengths."""

import random

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical, Normal

random.seed(7)


class Walk:
    def reset(self):
        self.x, self.t = random.uniform(-1, 1), 0
        return np.array([self.x, 1.0])

    def step(self, action):
        self.x += 0.2 if action else -0.2
        self.t += 1
        return np.array([self.x, 1.0]), 1.0 - abs(self.x), abs(self.x) > 2 or self.t >= 8


environment, policy = Walk(), nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2), nn.Softmax(dim=1))
critic = nn.Linear(2, 1)
optimizer = torch.optim.Adam([*policy.parameters(), *critic.parameters()], lr=1e-2)
for episode in range(4):
    state, rewards, log_probs, states = environment.reset(), [], [], []
    done = False
    while not done:
        states.append(state)
        actions = Categorical(policy(torch.from_numpy(state).unsqueeze(0)))
        action = actions.sample()
        log_probs.append(actions.log_prob(action))
        state, reward, done = environment.step(action.item())
        rewards.append(reward)
    returns = torch.tensor(rewards).flip(0).cumsum(0).flip(0)
    returns = (returns - returns.mean()) / (returns.std() + 1e-8)
    values = critic(torch.from_numpy(np.stack(states))).squeeze(1)
    loss = (-torch.cat(log_probs) * (returns - values.detach())).sum() + (returns - values).square().mean()
    loss = loss - Normal(values, 1.0).log_prob(returns).mean() + Normal(values, 0.5).rsample().mean() * 0.1
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_value_(policy.parameters(), 0.5)
    optimizer.step()
    print(episode, sum(rewards), loss.item())
torch.save(policy.state_dict(), "policy.pt")
