"""The Redis schema: names, and the scripts that are the only writers. Schema and code that speaks it change together.

    warmroute:<schema>:<fingerprint>:reg   hash, the registry:
        epoch        names the block keys; a lost registry means a new epoch, so old blocks mean nothing
        n            counts changes
        a:<worker>   "<slot>|<incarnation>" of the worker's present life
        o:<worker>   "<owner>|<expires, ms>": the one indexer that may write for it
        b:<worker>   block size in tokens
        s:<slot>     the worker whose bit it is: only these count
        r:<slot>     "<state>|<ms>": w = waits for a sweep, c = swept, cools until nobody can have the old bit in mind
        tiers        which tiers were ever written, e.g. "gpu,cpu"
        sweep        "<owner>|<expires, ms>": who sweeps
    warmroute:<schema>:<fingerprint>:ver   "<epoch>:<n>", read with every lookup
    <4 characters><8 bytes>                a block: bitmap of slots, bit s at offset s ^ 7 (so that little-endian bytes
                                           read as an int have bit s for slot s); one 4-character prefix a tier
    warmroute:<schema>:<fingerprint>:snap:<worker>  the indexer's own memory of a worker, for its restarts
    warmroute:<schema>:<fingerprint>:feed  channel: removals and changes, as they happen

The fingerprint covers schema and seed; the seed itself is nowhere in Redis.
"""

import base64
from typing import Final

import xxhash

from router.core.types import TIERS, Tier

SCHEMA: Final = 1
MAX_SLOTS: Final = 4096


def fingerprint(seed: str) -> str:
    """Names an installation's index without telling its seed."""
    return xxhash.xxh3_64_hexdigest(f"warmroute index {SCHEMA}\0{seed}".encode())[:12]


def block_prefix(fp: str, epoch: str, tier: Tier) -> bytes:
    """Four characters: with 8 bytes of key a name fits the allocator's 16-byte class."""
    digest = xxhash.xxh3_64_digest(f"{fp}\0{epoch}\0{tier}".encode())
    return base64.urlsafe_b64encode(digest)[:4]


def block_prefixes(fp: str, epoch: str) -> dict[Tier, bytes]:
    """The prefix of every tier."""
    return {tier: block_prefix(fp, epoch, tier) for tier in TIERS}


_NOW = """
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local reg, ver, feed = KEYS[1], KEYS[2], KEYS[3]
local function changed(what)
  local n = redis.call('HINCRBY', reg, 'n', 1)
  redis.call('SET', ver, redis.call('HGET', reg, 'epoch') .. ':' .. n)
  redis.call('PUBLISH', feed, 'v')
end
local function lost() return redis.call('EXISTS', reg) == 0 or redis.call('EXISTS', ver) == 0 end
local function mine(field, owner)
  local o = redis.call('HGET', reg, field)
  if not o then return true end
  local who, till = string.match(o, '^(.*)|(%d+)$')
  return who == owner or tonumber(till) < now
end
"""

# ARGV: worker, owner, lease_ms, incarnation, epoch if a new one is needed, max slots
# -> {"not_owner"} | {"full"} | {"ok", epoch, slot}
REGISTER = (
    _NOW
    + """
local worker, owner, lease, incarnation = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
if lost() then
  redis.call('DEL', reg)
  redis.call('HSET', reg, 'epoch', ARGV[5])
end
if not mine('o:' .. worker, owner) then return {'not_owner'} end
redis.call('HSET', reg, 'o:' .. worker, owner .. '|' .. string.format('%d', now + lease))
local old = redis.call('HGET', reg, 'a:' .. worker)
if old then
  local slot = string.match(old, '^(%d+)|')
  redis.call('HDEL', reg, 's:' .. slot)
  redis.call('HSET', reg, 'r:' .. slot, 'w|' .. string.format('%d', now))
end
local taken = {}
for _, field in ipairs(redis.call('HKEYS', reg)) do
  local slot = string.match(field, '^[sr]:(%d+)$')
  if slot then taken[tonumber(slot)] = true end
end
local slot = 0
while taken[slot] do slot = slot + 1 end
if slot >= tonumber(ARGV[6]) then
  redis.call('HDEL', reg, 'a:' .. worker)
  changed()
  return {'full'}
end
redis.call('HSET', reg, 's:' .. slot, worker, 'a:' .. worker, slot .. '|' .. incarnation)
changed()
return {'ok', redis.call('HGET', reg, 'epoch'), slot}
"""
)

# ARGV: worker, "<slot>|<incarnation>", epoch, tier names to note, offset, gpu prefix,
#       then triples: "+" or "-", prefix, keys of 8 bytes each
# -> "ok" | "unregistered"
APPLY = """
local reg, ver, feed = KEYS[1], KEYS[2], KEYS[3]
local life = redis.call('HMGET', reg, 'a:' .. ARGV[1], 'epoch', 'tiers')
if life[1] ~= ARGV[2] or life[2] ~= ARGV[3] or redis.call('EXISTS', ver) == 0 then return 'unregistered' end
if ARGV[4] ~= '' then
  local tiers = life[3] or 'gpu'
  for tier in string.gmatch(ARGV[4], '%a+') do
    if not string.find(tiers, tier, 1, true) then
      tiers = tiers .. ',' .. tier
      redis.call('HSET', reg, 'tiers', tiers)
      local n = redis.call('HINCRBY', reg, 'n', 1)
      redis.call('SET', ver, life[2] .. ':' .. n)
      redis.call('PUBLISH', feed, 'v')
    end
  end
end
local offset = tonumber(ARGV[5])
local set, unset
if redis.SERVER_NAME == 'valkey' then
  -- a short value that was SET stays inside the key's entry: 58 bytes a block; one that SETBIT touched takes 82
  local at, bit = math.floor(offset / 8) + 1, 2 ^ (7 - offset % 8)
  local fresh = string.rep('\\0', at - 1) .. string.char(bit)
  local function flip(name, v, by)
    redis.call('SET', name, string.sub(v, 1, at - 1) .. string.char(string.byte(v, at) + by) .. string.sub(v, at + 1))
  end
  set = function(name)
    if redis.call('SET', name, fresh, 'NX') then return end
    local v = redis.call('GET', name)
    if #v < at then v = v .. string.rep('\\0', at - #v) end
    if math.floor(string.byte(v, at) / bit) % 2 == 0 then flip(name, v, bit) end
  end
  unset = function(name)
    local v = redis.call('GET', name)
    if not v or #v < at or math.floor(string.byte(v, at) / bit) % 2 == 0 then return end
    if redis.call('BITCOUNT', name) == 1 then redis.call('DEL', name) else flip(name, v, -bit) end
  end
else
  set = function(name) redis.call('SETBIT', name, offset, 1) end
  unset = function(name)
    redis.call('SETBIT', name, offset, 0)
    if redis.call('BITCOUNT', name) == 0 then redis.call('DEL', name) end
  end
end
for i = 7, #ARGV, 3 do
  local prefix, keys = ARGV[i + 1], ARGV[i + 2]
  local change = ARGV[i] == '+' and set or unset
  for at = 1, #keys, 8 do change(prefix .. string.sub(keys, at, at + 7)) end
  if ARGV[i] == '-' then
    if prefix == ARGV[6] then redis.call('PUBLISH', feed, 'r' .. ARGV[1] .. '\\n' .. keys) end
  end
end
return 'ok'
"""

# ARGV: worker, owner
DROP = (
    _NOW
    + """
local worker, owner = ARGV[1], ARGV[2]
if lost() or not mine('o:' .. worker, owner) then return 'not_owner' end
local old = redis.call('HGET', reg, 'a:' .. worker)
if old then
  local slot = string.match(old, '^(%d+)|')
  redis.call('HDEL', reg, 's:' .. slot)
  redis.call('HSET', reg, 'r:' .. slot, 'w|' .. string.format('%d', now))
end
redis.call('HDEL', reg, 'a:' .. worker, 'o:' .. worker, 'b:' .. worker)
changed()
return 'ok'
"""
)

# ARGV: worker, "<slot>|<incarnation>", block size
LEARNT = (
    _NOW
    + """
if lost() or redis.call('HGET', reg, 'a:' .. ARGV[1]) ~= ARGV[2] then return 'unregistered' end
if redis.call('HGET', reg, 'b:' .. ARGV[1]) ~= ARGV[3] then
  redis.call('HSET', reg, 'b:' .. ARGV[1], ARGV[3])
  changed()
end
return 'ok'
"""
)

# Prolong the leases. ARGV: owner, lease_ms, then pairs: worker, "<slot>|<incarnation>" -> the workers that are lost
RENEW = (
    _NOW
    + """
local owner, till = ARGV[1], string.format('%d', now + tonumber(ARGV[2]))
local gone = {}
local all = lost()
for i = 3, #ARGV, 2 do
  local worker = ARGV[i]
  if all or redis.call('HGET', reg, 'a:' .. worker) ~= ARGV[i + 1] or not mine('o:' .. worker, owner) then
    gone[#gone + 1] = worker
  else
    redis.call('HSET', reg, 'o:' .. worker, owner .. '|' .. till)
  end
end
return gone
"""
)

# Give ownership back, so that a standby need not wait for the lease to end. ARGV: owner, then workers
RELEASE = (
    _NOW
    + """
for i = 2, #ARGV do
  local o = redis.call('HGET', reg, 'o:' .. ARGV[i])
  if o and string.match(o, '^(.*)|%d+$') == ARGV[1] then redis.call('HDEL', reg, 'o:' .. ARGV[i]) end
end
return 'ok'
"""
)

# Begin, continue or end a sweep. ARGV: owner, lease_ms, cool_ms
# -> {"none"} | {"other"} | {"sweep", epoch, slot...}: slots that wait for a sweep; cooled ones are freed on the way
SWEEP_BEGIN = (
    _NOW
    + """
if lost() or not mine('sweep', ARGV[1]) then return {'other'} end
local waiting, all = {}, redis.call('HGETALL', reg)
for i = 1, #all, 2 do
  local slot = string.match(all[i], '^r:(%d+)$')
  if slot then
    local state, at = string.match(all[i + 1], '^(%a)|(%d+)$')
    if state == 'c' then
      if tonumber(at) + tonumber(ARGV[3]) < now then redis.call('HDEL', reg, all[i]) end
    else
      waiting[#waiting + 1] = slot
    end
  end
end
if #waiting == 0 then return {'none'} end
redis.call('HSET', reg, 'sweep', ARGV[1] .. '|' .. string.format('%d', now + tonumber(ARGV[2])))
return {'sweep', redis.call('HGET', reg, 'epoch'), unpack(waiting)}
"""
)

# One step. ARGV: owner, lease_ms, epoch, cursor, prefix, count, offsets... -> {cursor, touched} | {"other"}
SWEEP_STEP = (
    _NOW
    + """
if lost() or not mine('sweep', ARGV[1]) or redis.call('HGET', reg, 'epoch') ~= ARGV[3] then return {'other'} end
redis.call('HSET', reg, 'sweep', ARGV[1] .. '|' .. string.format('%d', now + tonumber(ARGV[2])))
local step = redis.call('SCAN', ARGV[4], 'MATCH', ARGV[5] .. '*', 'COUNT', ARGV[6], 'TYPE', 'string')
local touched, bits = 0, {}
for i = 7, #ARGV do
  local offset = tonumber(ARGV[i])
  bits[#bits + 1] = {offset, math.floor(offset / 8) + 1, 2 ^ (7 - offset % 8)}
end
for _, name in ipairs(step[2]) do
  if #name == 12 then
    local hit, v = false, redis.call('GET', name)
    for _, b in ipairs(bits) do
      if #v >= b[2] and math.floor(string.byte(v, b[2]) / b[3]) % 2 == 1 then
        redis.call('SETBIT', name, b[1], 0)
        hit = true
      end
    end
    if hit then
      touched = touched + 1
      if redis.call('BITCOUNT', name) == 0 then redis.call('DEL', name) end
    end
  end
end
return {step[1], touched}
"""
)

# The sweep went through. ARGV: owner, epoch, slots...
SWEEP_END = (
    _NOW
    + """
if lost() or not mine('sweep', ARGV[1]) or redis.call('HGET', reg, 'epoch') ~= ARGV[2] then return 'other' end
for i = 3, #ARGV do
  if redis.call('HEXISTS', reg, 'r:' .. ARGV[i]) == 1 then
    redis.call('HSET', reg, 'r:' .. ARGV[i], 'c|' .. string.format('%d', now))
  end
end
redis.call('HDEL', reg, 'sweep')
return 'ok'
"""
)
