-- One atomic attempt at the store of limits: rate_limit.Buckets.attempt inside Redis (6.2+) or Valkey.
-- The Python is the reference; tests/contracts/test_limits_store.py holds this script to it, reply by reply.
--
-- KEYS  1 the store's life (hash)  2 living processes (zset)  3 report numbers (hash)
--       4 the stop that this run follows (hash, clean_stop.py)  5.. one bucket each
-- ARGV  1 run id the caller believes in  2 "1" if it has just read that id on this connection
--       3 "1" if it talked to any store before  4 "1" if that was another run  5 seconds this server has been up
--       6 process id  7 report number (0: none)  8 opening us  9.. constants,
--       16 one JSON array with an array per bucket (the client pays about 1 us for each argument of a call)
-- Reply {status, now_us, processes, admitted, then per bucket: level, fraction, out, granted, generation, known}
-- Status 0 decided, 1 read the run id again and come back, 2 the store is opening (nobody may be admitted yet).
--
-- Every number is an integer below 2^53, the largest that a Lua number (a double) holds exactly. Time is Redis TIME in
-- microseconds; a bucket is whole tokens and a fraction in 1/period_us tokens, so the refill is exact.

if redis.replicate_commands then redis.replicate_commands() end -- needed before Redis 7 to write after TIME

local FIRST_BUCKET = 5
local fmod, floor, max, min = math.fmod, math.floor, math.max, math.min

local clock = redis.call('TIME')
local now = tonumber(clock[1]) * 1000000 + tonumber(clock[2])
local run, just_read = ARGV[1], ARGV[2] == '1'
local process, sequence = ARGV[6], tonumber(ARGV[7])
local opening_us = tonumber(ARGV[8])
local lease_ttl, slot_ttl = tonumber(ARGV[9]), tonumber(ARGV[10])
local restart_us, process_ttl, forget_us = tonumber(ARGV[11]), tonumber(ARGV[12]), tonumber(ARGV[13])
local share, max_pools = tonumber(ARGV[14]), tonumber(ARGV[15])

-- Which life of the store this is: store_life.next_life, which gives the reasons. A restart, or the loss of its data,
-- begins a new era, in which every bucket is empty; a run that follows a clean stop goes on in the era it finds. Only a
-- store that nobody has ever used starts with full buckets.
local born = redis.call('HMGET', KEYS[1], 'run', 'empty_until', 'opened', 'era')
local born_run, empty_until, opened = born[1], tonumber(born[2] or '0'), tonumber(born[3] or '0')
local era = born[4] or born_run
local stranger = born_run ~= run
if stranger and not just_read then return {1, now, 0, 0} end

local stop = stranger and redis.call('HMGET', KEYS[4], 'run', 'after', 'stopped_us', 'doubt') or {}
local told = stop[1] == run
local trusted = told and stop[2] == born_run
  and redis.call('ZCOUNT', KEYS[2], tonumber(stop[3]) - process_ttl, '+inf') == 0

if stranger and trusted then
  redis.call('HSET', KEYS[1], 'run', run, 'era', era)
elseif stranger or (ARGV[4] == '1' and empty_until == 0) then
  local lost = born_run or ARGV[3] == '1' or ARGV[4] == '1' or (told and stop[4] == '1')
  empty_until, opened, era = 0, now, run
  if lost then
    empty_until = now + restart_us
  elseif tonumber(ARGV[5]) >= 2 then
    opened = now - opening_us -- up for long, and no process that knew an earlier life has come: there is none
  end
  redis.call('HSET', KEYS[1], 'run', run, 'empty_until', string.format('%.0f', empty_until),
    'opened', string.format('%.0f', opened), 'era', era)
end

redis.call('ZADD', KEYS[2], now, process)
local processes = max(1, redis.call('ZCOUNT', KEYS[2], now - process_ttl, '+inf'))
local silent = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now - forget_us, 'LIMIT', 0, 16)
for _, name in ipairs(silent) do
  redis.call('ZREM', KEYS[2], name)
  redis.call('HDEL', KEYS[3], name)
end

if empty_until == 0 and now < opened + opening_us then return {2, now, processes, 0} end

local is_new = true
if sequence > 0 then
  is_new = sequence > tonumber(redis.call('HGET', KEYS[3], process) or '0')
  if is_new then redis.call('HSET', KEYS[3], process, ARGV[7]) end
end

-- floor((start + a * b) / m) and the remainder, exact for a, m < 2^42: schoolbook multiplication in base 1024.
local function muldiv(a, b, m, start)
  local digits, count = {}, 0
  repeat
    count = count + 1
    digits[count] = fmod(b, 1024)
    b = (b - digits[count]) / 1024
  until b == 0
  local quotient, rest = 0, 0
  for i = count, 1, -1 do
    local total = rest * 1024 + a * digits[i]
    rest = fmod(total, m)
    quotient = quotient * 1024 + (total - rest) / m
  end
  local total = rest + start
  rest = fmod(total, m)
  return quotient + (total - rest) / m, rest
end

-- A bucket is {level, fraction, at, era, generation, pools, leases}; pools {generation, tokens, ..} oldest first;
-- leases {id, tokens, ends, ..}. Here: `out` is kept beside it.
local function out_of(bucket)
  local out = 0
  for i = 2, #bucket[7], 3 do out = out + bucket[7][i] end
  return out
end

-- A full bucket keeps no fraction. Below the top, the pools' last token stands for it until it is whole.
local function top(ask, bucket, out)
  if bucket[1] >= ask.burst - out then bucket[1], bucket[2] = ask.burst - out, 0 end
end

local function cap(ask, bucket, out)
  local pools, over = bucket[6], bucket[1] + out - ask.burst
  for i = 2, #pools, 2 do over = over + pools[i] end
  if #pools > 0 and over > 0 then
    bucket[5] = max(bucket[3], bucket[5] + 1)
    while #pools > 0 and over > 0 do
      local cut = min(over, pools[2])
      pools[2] = pools[2] - cut
      over = over - cut
      if pools[2] == 0 then
        table.remove(pools, 1)
        table.remove(pools, 1)
      end
    end
  end
  top(ask, bucket, out)
end

local function refill(ask, bucket, till)
  if ask.slots then return end
  local passed = max(0, till - bucket[3])
  bucket[3] = bucket[3] + passed
  if passed > 0 and ask.amount * passed / ask.period >= ask.burst - bucket[1] + 1 then
    bucket[1], bucket[2] = ask.burst, 0
  elseif passed > 0 then
    local tokens, fraction = muldiv(ask.amount, passed, ask.period, bucket[2])
    bucket[1], bucket[2] = min(bucket[1] + tokens, ask.burst), fraction
  end
  cap(ask, bucket, out_of(bucket))
end

-- End every lease at its own time: until then its tokens hold the refill back.
local function advance(ask, bucket)
  local leases, over, still = bucket[7], {}, {}
  for i = 1, #leases, 3 do
    if leases[i + 2] <= now then over[#over + 1] = {leases[i + 2], i} end
  end
  table.sort(over, function(a, b) return a[1] < b[1] end)
  for _, ended in ipairs(over) do
    refill(ask, bucket, ended[1])
    leases[ended[2] + 1] = 0
  end
  if #over > 0 then
    for i = 1, #leases, 3 do
      if leases[i + 2] > now then
        local n = #still
        still[n + 1], still[n + 2], still[n + 3] = leases[i], leases[i + 1], leases[i + 2]
      end
    end
    bucket[7] = still
  end
  refill(ask, bucket, now)
end

local function load(key, ask)
  local packed = redis.call('GET', key)
  local bucket
  if packed then
    bucket = cmsgpack.unpack(packed)
    if bucket[4] ~= era then -- known from before a loss: what it was spent since is not
      advance(ask, bucket)
      local debt = min(bucket[1], 0)
      bucket[1], bucket[2], bucket[4] = debt, 0, era
      bucket[3] = empty_until > 0 and empty_until or now
      bucket[5], bucket[6] = max(now, bucket[5] + 1), {}
    end
  elseif empty_until > 0 then
    bucket = {0, 0, empty_until, era, now, {}, {}}
  else
    bucket = {ask.burst, 0, now, era, now, {}, {}}
  end
  advance(ask, bucket)
  return bucket
end

local function lease_at(bucket, id)
  for i = 1, #bucket[7], 3 do
    if bucket[7][i] == id then return i end
  end
end

local function pool(bucket, spent)
  local pools = bucket[6]
  if spent == 0 then return end
  if #pools > 0 and pools[#pools - 1] == bucket[5] then
    pools[#pools] = pools[#pools] + spent
  else
    pools[#pools + 1] = bucket[5]
    pools[#pools + 1] = spent
    if #pools > 2 * max_pools then
      table.remove(pools, 1)
      table.remove(pools, 1)
    end
  end
end

local function credit(bucket, generation, tokens)
  local pools = bucket[6]
  for i = 1, #pools, 2 do
    if pools[i] == generation then
      local paid = min(tokens, pools[i + 1])
      pools[i + 1] = pools[i + 1] - paid
      bucket[1] = bucket[1] + paid
      return paid
    end
  end
  return 0
end

local function report(ask, bucket)
  local at, spent = lease_at(bucket, ask.id), 0
  if at then
    spent = min(ask.spent, bucket[7][at + 1])
    local returned = min(ask.returned, bucket[7][at + 1] - spent)
    bucket[7][at + 1] = bucket[7][at + 1] - spent - returned
    if not ask.slots then
      pool(bucket, spent)
      bucket[1] = bucket[1] + returned
    end
  end
  bucket[1] = bucket[1] - ask.debt
  local paid = 0
  for generation, tokens in string.gmatch(ask.credits, '(%d+):(%d+)') do
    paid = paid + credit(bucket, tonumber(generation), tonumber(tokens))
  end
  if paid > 0 then
    local held = bucket[1] + out_of(bucket)
    for i = 2, #bucket[6], 2 do held = held + bucket[6][i] end
    if held >= ask.burst then bucket[2] = 0 end
  end
  if not ask.slots then top(ask, bucket, out_of(bucket)) end
  return spent == ask.spent and bucket[5] or 0
end

local function renew(ask, bucket)
  local at = lease_at(bucket, ask.id)
  if not at and ask.slots and ask.held > 0 then
    at = #bucket[7] + 1
    bucket[7][at], bucket[7][at + 1], bucket[7][at + 2] = ask.id, ask.held, now + ask.ttl
  end
  if not at then return end
  if bucket[7][at + 1] == 0 then
    for _ = 1, 3 do table.remove(bucket[7], at) end
  elseif ask.renew then
    bucket[7][at + 2] = now + ask.ttl
  end
end

local function free(ask, bucket)
  if not ask.slots then return bucket[1] end
  if now < empty_until then return 0 end
  return max(0, ask.amount - out_of(bucket))
end

local function grant(ask, bucket)
  local rest = free(ask, bucket) - ask.need
  local tokens = ask.need + max(0, min(ask.want, floor(rest / (share * processes))))
  if tokens == 0 then return 0 end
  local at = lease_at(bucket, ask.id)
  if not at then
    at = #bucket[7] + 1
    bucket[7][at], bucket[7][at + 1] = ask.id, 0
  end
  bucket[7][at + 1], bucket[7][at + 2] = bucket[7][at + 1] + tokens, now + ask.ttl
  if not ask.slots then bucket[1] = bucket[1] - tokens end
  return tokens
end

-- A bucket that nobody touches until it is full again says nothing: an unknown bucket is full too.
local function keep_ms(ask, bucket)
  local refill_ms = 0
  if not ask.slots and ask.amount > 0 then
    refill_ms = (ask.burst - bucket[1] + 1) * (ask.period / ask.amount) / 1000 + max(0, bucket[3] - now) / 1000
  elseif not ask.slots then
    refill_ms = ask.period / 1000 * 2
  end
  return string.format('%.0f', refill_ms + 60000)
end

local asks, buckets = {}, {}
for i, told in ipairs(cjson.decode(ARGV[16])) do
  local ask = {
    slots = told[1], amount = told[2], period = told[3], burst = told[4], id = told[5], need = told[6],
    want = told[7], spent = told[8], returned = told[9], debt = told[10], credits = told[11], held = told[12],
    renew = told[13], ttl = told[1] and slot_ttl or lease_ttl,
  }
  asks[i], buckets[i] = ask, load(KEYS[i + FIRST_BUCKET - 1], ask)
end

local reply, admitted = {0, now, processes, 1}, true
local known, generations = {}, {}
for i, ask in ipairs(asks) do
  known[i] = lease_at(buckets[i], ask.id) and 1 or 0
  generations[i] = is_new and report(ask, buckets[i]) or 0
  renew(ask, buckets[i])
  if ask.need > 0 and ask.need > free(ask, buckets[i]) then admitted = false end
end
for i, ask in ipairs(asks) do
  local granted = admitted and grant(ask, buckets[i]) or 0
  local n = #reply
  reply[n + 1], reply[n + 2], reply[n + 3] = free(ask, buckets[i]), buckets[i][2], out_of(buckets[i])
  reply[n + 4], reply[n + 5], reply[n + 6] = granted, generations[i], known[i]
  redis.call('SET', KEYS[i + FIRST_BUCKET - 1], cmsgpack.pack(buckets[i]), 'PX', keep_ms(ask, buckets[i]))
end
reply[4] = admitted and 1 or 0
return reply
