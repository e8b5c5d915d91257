-- After the segment is stored: drop the claimed entries, then record it. A compare-and-set on the claim.
-- KEYS: meta frames offsets claim
-- ARGV: token epoch, then "source:generation" and its end for each
-- Answer: 1 done (now or by an earlier call), 0 the claim is no longer this one's
local meta, frames, offsets, claim = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local token, epoch = ARGV[1], ARGV[2]
local known = redis.call('HMGET', meta, 'epoch', 'pending', 'sealer')
local held = redis.call('HMGET', claim, 'token', 'epoch', 'last', 'bytes')
if known[1] ~= epoch then return 0 end
if held[1] ~= token or held[2] ~= epoch then
  if known[3] == token then return 1 end
  return 0
end

-- The stream's key was lost: the lane's next "open" must still see that entries were pending.
if redis.call('EXISTS', frames) == 0 then return 0 end

local function text(number) return string.format('%.0f', number) end

-- Trim before record: a full Redis refuses HSET as a script's first write, XTRIM never.
local milliseconds, sequence = string.match(held[3], '^(%d+)-(%d+)$')
redis.call('XTRIM', frames, 'MINID', milliseconds .. '-' .. text(tonumber(sequence) + 1))

local function record(...)
  local done = redis.pcall(...)
  return type(done) == 'table' and done.err or nil
end

for i = 3, #ARGV, 2 do
  local field, past = ARGV[i], tonumber(ARGV[i + 1])
  local stored = redis.call('HMGET', offsets, field, field .. ':s')
  local sealed = math.max(tonumber(stored[2]) or 0, past)
  local committed = math.max(tonumber(stored[1]) or 0, sealed)
  local failure = record('HSET', offsets, field, text(committed), field .. ':s', text(sealed))
  if failure then return redis.error_reply(failure) end
end
-- What waits now has waited since its entry was made: an id begins with the millisecond.
local head = redis.call('XRANGE', frames, '-', '+', 'COUNT', 1)[1]
if head then
  local failure = record('HSET', meta, 'waiting',
    string.format('%.3f', tonumber(string.match(head[1], '^%d+')) / 1000))
  if failure then return redis.error_reply(failure) end
end
local pending = math.max(0, (tonumber(known[2]) or 0) - tonumber(held[4]))
if redis.call('XLEN', frames) == 0 then pending = 0 end
local time = redis.call('TIME')
local failure = record('HSET', meta, 'pending', text(pending), 'sealer', token,
  'last_commit', time[1] .. '.' .. string.format('%06d', tonumber(time[2])))
if failure then return redis.error_reply(failure) end
redis.call('DEL', claim)
return 1
